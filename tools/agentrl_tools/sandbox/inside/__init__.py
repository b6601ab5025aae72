"""The programs inside the sandbox. They are started by file, in another root: the standard library only."""
