"""What runs inside: the standard library only, since it is started by file, in another root. Never imported outside."""
