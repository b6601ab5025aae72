import verifiers.v1 as vf

STOCK = {"nails": 12, "screws": 40, "hinges": 7, "locks": 3, "bolts": 25, "hooks": 9}


class StoreToolset(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "store"

    @vf.tool
    async def count(self, thing: str) -> str:
        """Return how many of a thing are in stock."""
        return str(STOCK[thing]) if thing in STOCK else f"there are no {thing}"


if __name__ == "__main__":
    StoreToolset.run()
