"""The demo: a small target that travels with the package, prompts for it, and a drafter trained in minutes."""
