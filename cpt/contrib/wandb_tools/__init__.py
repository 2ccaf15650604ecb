"""W&B runs made from run folders."""
