"""The frozen target: loaded, tapped, stopped early, and run on packed rows."""
