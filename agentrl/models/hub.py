"""What is loaded from a folder or the model hub, and sent there: quietly, and its many ways to fail as a sentence."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.errors import UserError


def quiet() -> None:
    """Leave the libraries that load models their errors alone: no progress, no warnings on the terminal."""
    for library in ("transformers", "huggingface_hub", "bitsandbytes"):
        logging.getLogger(library).setLevel(logging.ERROR)


@contextmanager
def loading(what: str, hint: str = "") -> Iterator[None]:
    """Inside, transformers loads something. Raises UserError, which names ``what``, where it cannot."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    quiet()
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UserError(f"cannot load {what}: {reason}{hint}") from error


def may_push(name: str) -> None:
    """Raises UserError: there is no token."""
    import huggingface_hub

    if huggingface_hub.get_token() is None:
        raise UserError(f"cannot push to {name!r}: there is no token; `hf auth login`, or HF_TOKEN in the environment")


def push(folder: Path, name: str, *, private: bool) -> str:
    """Upload a folder as the model ``name``, made if it is not there; its address.

    Raises:
        UserError: there is no token, the hub refuses it, or cannot be reached.
    """
    import httpx2
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    api = huggingface_hub.HfApi(library_name="agentrl")
    may_push(name)
    try:
        url = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Trained with agentrl")
    except (HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled, httpx2.HTTPError, OSError) as error:
        raise UserError(f"cannot push to {name!r}: {str(error).strip().splitlines()[0]}") from error
    return str(url)
