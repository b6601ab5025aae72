"""Code of a model in the sandbox, without an environment: a call alone, and a session with variables and files."""

import asyncio

import agentrl_tools.sandbox as sandbox


async def play() -> None:
    async with sandbox.open(limits=sandbox.SandboxLimits(disk_mb=16)) as box:
        print(box.walls)
        alone = await box.run("print(6 * 7)")
        print(f"{alone.status}: {alone.output.strip()}")
        hostile = await box.run("open('/etc/passwd').read()")
        print(f"{hostile.status}: {hostile.output.splitlines()[-1]}")
        async with box.session() as session:
            await session.files.write("numbers.txt", "1 2 3")
            await session.run("numbers = [int(n) for n in open('numbers.txt').read().split()]")
            print((await session.run("sum(numbers)")).output.strip())


def main() -> None:
    asyncio.run(play())


if __name__ == "__main__":
    main()
