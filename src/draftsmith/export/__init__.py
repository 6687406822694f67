"""What is served: drafters in the layouts of others, the contract's lint, and parity of decoding with training."""
