"""Which ranks there are, how they find each other, and where this process stands among them."""
