import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from agentrl.engines.embedded.kv_cache import KEPT_BYTES, ForwardBatch, SessionCache, SlotCache

HEADS, KV_HEADS, DIM = 4, 2, 8


def cache() -> SlotCache:
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM)
    return SlotCache(config, torch.float32, torch.device("cpu"))


def plainly(query: Tensor, key: Tensor, value: Tensor, start: int, window: int | None) -> Tensor:
    """Attention of one row, written out: (tokens, heads, dim) over (positions, kv heads, dim)."""
    key, value = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / DIM**0.5
    at = start + torch.arange(len(query))[:, None]
    keys = torch.arange(len(key))
    hidden = (keys > at) | (keys <= at - (window or 1 << 20))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 1, 4, 2], [3, 5], [1, 1, 3, 1]])
def test_ragged_rows_attend_to_their_own_past_only(counts: list[int], window: int | None) -> None:
    torch.manual_seed(0)
    store, cached, layer, first = cache(), [7, 2, 130, 3][: len(counts)], 1, 2
    past = [torch.randn(c, 2 * KV_HEADS, DIM) for c in cached]
    for i, p in enumerate(past):
        store.write(first + i, torch.stack([p.transpose(0, 1).view(2, KV_HEADS, -1, DIM)] * 2))
    query, new = torch.randn(sum(counts), HEADS, DIM), torch.randn(sum(counts), 2 * KV_HEADS, DIM)

    plan = ForwardBatch(store, [[0] * n for n in counts], cached, first)
    plan.write(layer, new)
    found = torch.split(plan.attend(layer, query, None, window), counts)

    for i, (q, kv) in enumerate(zip(torch.split(query, counts), torch.split(new, counts), strict=True)):
        keys, values = torch.split(torch.cat([past[i], kv]), KV_HEADS, 1)
        torch.testing.assert_close(found[i], plainly(q, keys, values, cached[i], window))


def test_a_forward_batch_has_the_slot_and_position_of_each_token() -> None:
    plan = ForwardBatch(cache(), [[5], [6, 7, 8]], [4, 0])
    assert plan.ids.tolist() == [5, 6, 7, 8]
    assert plan.positions.tolist() == [4, 0, 1, 2]
    assert plan.last is not None
    assert plan.last.tolist() == [0, 3]
    assert [(s.longest, s.length) for s in plan.blocks] == [(1, 5), (3, 3)]


def test_a_cache_that_grows_keeps_what_it_holds() -> None:
    store = cache()
    known = torch.randn(2, 2, KV_HEADS, 100, DIM)
    store.write(3, known)
    store.reserve(9, 500)
    assert store.keys_values.shape[2:5] == (16, KV_HEADS, 512)
    assert torch.equal(store.read(3, 100), known)


def test_a_full_cache_gives_empty_slots_for_positions() -> None:
    store = cache()
    store.reserve(60, 100)
    store.max_bytes = store.keys_values.nbytes  # 64 slots of 128 positions
    assert store.fits(64, 128)
    assert not store.fits(33, 129)
    assert store.fits(32, 256)
    known = torch.randn(2, 2, KV_HEADS, 100, DIM)
    store.write(3, known)
    store.reserve(5, 400)
    assert store.keys_values.shape[2:5] == (8, KV_HEADS, 512)
    assert torch.equal(store.read(3, 100), known)


def test_a_large_cache_gives_its_memory_back_and_a_small_one_stays() -> None:
    store = cache()
    store.reserve(16, 128)
    store.release()
    assert store.keys_values.shape[2] == 16
    store.reserve(16, KEPT_BYTES // store.keys_values[:, :, :, :, :1].nbytes + 1)
    store.release()
    assert store.keys_values.shape[2:5] == (8, KV_HEADS, 128)


def test_the_oldest_sessions_are_dropped_from_a_full_cache() -> None:
    values = torch.zeros(10)
    sessions: SessionCache[torch.Tensor] = SessionCache(limit=2 * values.nbytes)
    for session in ("a", "b", "a", "c"):  # keeping again makes "a" younger than "b"
        sessions.put(session, [1], values, values.nbytes)
    assert sessions.get("b") is None
    assert sessions.get("a") is not None
    assert sessions.size == 2 * values.nbytes
    sessions.remove("a")
    sessions.remove("a")
    assert len(sessions.values()) == 1
    sessions.put("too large", [1], torch.zeros(30), 120)
    assert (sessions.size, sessions.values()) == (0, [])
    sessions.put("d", [1], values, values.nbytes)
    sessions.clear()
    assert (sessions.size, sessions.get("d")) == (0, None)
