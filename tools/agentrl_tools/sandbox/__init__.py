"""The sandbox for model-written code: bubblewrap, seccomp, landlock, limits, another user. See docs/sandbox.md."""
