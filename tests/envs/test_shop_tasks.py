import json
from pathlib import Path

from agentrl_envs import shop_tasks, symbols
from agentrl_tools.calculator import evaluate_expression

DATA = Path(symbols.__file__).parent / "data"


def test_a_seed_is_a_shop() -> None:
    for split in ("train", "test"):
        assert shop_tasks.draw(3, split=split) == shop_tasks.draw(3, split=split)
    assert shop_tasks.draw(3, split="train") != shop_tasks.draw(4, split="train")


def test_the_answer_is_the_total() -> None:
    for seed in range(300):
        task = shop_tasks.draw(seed, split="test")
        assert 1 <= len(task.basket) <= 3
        assert evaluate_expression(task.expression) == task.answer
        assert task.answer == sum(count * task.prices[item] for item, count in task.basket.items())
        assert all(f"{count} {item}s" in task.question for item, count in task.basket.items())


def test_shops_with_the_same_basket_have_other_prices() -> None:
    shops = [shop_tasks.draw(seed, split="train") for seed in range(200)]
    assert len({shop.prices["apple"] for shop in shops}) > 60


def test_baskets_of_train_and_test_differ() -> None:
    train = {frozenset(shop_tasks.draw(seed, split="train").basket.items()) for seed in range(4000)}
    test = {frozenset(shop_tasks.draw(seed, split="test").basket.items()) for seed in range(1000)}
    assert not train & test


def test_a_price_is_found_by_singular_and_plural() -> None:
    shop = shop_tasks.draw(0, split="train")
    assert shop.price("apple") == shop.price("Apples ") == shop.prices["apple"]
    assert shop.price("dragon") is None


def test_symbols() -> None:
    for seed in range(500):
        task = symbols.draw(seed, split="train")
        assert task == symbols.draw(seed, split="train")
        assert str(int(task.solution)) == task.solution
        assert all(number in task.prompt for number in task.numbers)
    assert symbols._solve("reverse", ["123"]) == "321"
    assert symbols._solve("sort", ["312"]) == "123"
    assert symbols._solve("larger", ["12", "9"]) == "12"
    assert symbols._solve("smaller", ["12", "9"]) == "9"


def test_the_shipped_symbols_are_the_generated_ones_and_disjoint(tmp_path: Path) -> None:
    rows = {}
    for name, split, count in (("symbols", "train", 3000), ("symbols-test", "test", 256)):
        path = tmp_path / name
        symbols.write_rows(path, rows=count, split=split)  # type: ignore[arg-type]
        shipped = (DATA / f"{name}.jsonl").read_text(encoding="utf-8")
        assert shipped == path.read_text(encoding="utf-8")
        rows[split] = [json.loads(line) for line in shipped.splitlines()]
        assert len(rows[split]) == count
    assert not {r["prompt"] for r in rows["train"]} & {r["prompt"] for r in rows["test"]}
    assert all(set(row) == {"prompt", "solution"} for row in rows["train"])
