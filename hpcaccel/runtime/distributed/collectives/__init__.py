"""What ranks do together with tensors and objects, and how a rank that does not come is found out."""
