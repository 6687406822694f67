"""Who runs where: devices and roles, ordered hand-off between threads, the shared update, start and stop."""
