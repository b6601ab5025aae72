"""Modules that run inside the sandbox, where the package is not: they are sent there as bytecode."""
