"""DeepSpeed behind ``prepare``: its engine shards, steps, clips and scales."""
