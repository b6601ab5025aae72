"""Loading from a folder or the model hub, and pushing to it: quietly, with failures as one sentence."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from time import monotonic

from agentrl.errors import UserError

PROBE_S = 5.0  # for the hub to answer that it is there


def silence_libraries() -> None:
    """Silence the libraries that load models: no progress bars, no warnings, only errors."""
    for library in ("transformers", "huggingface_hub", "bitsandbytes"):
        logging.getLogger(library).setLevel(logging.ERROR)


@contextmanager
def explain_load_errors(what: str, hint: str = "", *, local: bool = False) -> Iterator[None]:
    """Raise UserError, which names ``what``, if the block fails to load something with transformers.

    Args:
        local: it is a folder, for which the hub is not asked.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    silence_libraries()
    try:
        with nullcontext() if local else _use_cache_without_hub():
            yield
    except UserError:
        raise
    except Exception as error:  # other people's files, read by other people's code
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        if "trust_remote_code" in str(error):
            reason = (
                f"it brings code of its own: read that, and if you trust it, say load.trust_remote_code true ({reason})"
            )
        raise UserError(f"cannot load {what}: {reason}{hint}") from error


@contextmanager
def _use_cache_without_hub() -> Iterator[None]:
    """Have files read from the cache alone where the hub does not answer: each would be tried for a minute."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _answers(constants.ENDPOINT, int(monotonic() // 60))
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@lru_cache(maxsize=1)
def _answers(endpoint: str, minute: int) -> bool:
    """Return True if the hub answers within seconds, whatever it says; it is asked once in a minute."""
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=PROBE_S)
    except Exception:  # of its client's own kinds
        return False
    return True


def check_push_token(name: str) -> None:
    """Check that the hub's token is there.

    Raises:
        UserError: there is no token.
    """
    import huggingface_hub

    if huggingface_hub.get_token() is None:
        raise UserError(f"cannot push to {name!r}: there is no token; `hf auth login`, or HF_TOKEN in the environment")


def push_to_hub(folder: Path, name: str, *, private: bool) -> str:
    """Upload a folder as the model ``name``, which is created if it does not exist; return its address.

    Raises:
        UserError: there is no token, the hub refuses it, or cannot be reached.
    """
    import httpx2
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    api = huggingface_hub.HfApi(library_name="agentrl")
    check_push_token(name)
    try:
        url = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Trained with agentrl")
    except (HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled, httpx2.HTTPError, OSError) as error:
        raise UserError(f"cannot push to {name!r}: {str(error).strip().splitlines()[0]}") from error
    return str(url)
