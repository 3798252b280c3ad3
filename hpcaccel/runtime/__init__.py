"""One process a rank: from the variables of its environment to a training loop that can be stopped and resumed."""
