"""The operations of the model, one family a file: the model calls only these."""
