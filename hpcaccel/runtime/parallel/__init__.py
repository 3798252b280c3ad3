"""One model on many ranks: DDP, FSDP2, tensor parallel; precision, compiling, activation checkpointing."""
