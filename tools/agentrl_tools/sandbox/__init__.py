"""Where code of the model's runs: bubblewrap, seccomp, landlock, limits, an unprivileged user. See docs/sandbox.md."""
