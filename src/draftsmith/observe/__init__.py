"""The single record of a run (events, JSON lines) and its readers: live line, TensorBoard, picture, run folder."""
