"""One model on many ranks: DDP, FSDP2, tensor parallelism; precision, compilation, activation checkpointing."""
