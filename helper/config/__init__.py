"""Settings from `helper.toml`, the environment and flags; later sources override earlier ones."""
