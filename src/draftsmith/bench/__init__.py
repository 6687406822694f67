"""Benchmarks: each part of the work timed alone, against what this card's matmuls reach in the same minute."""
