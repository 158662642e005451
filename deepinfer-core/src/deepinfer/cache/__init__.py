"""Who owns which page and state slot, and which bytes lie where in them."""
