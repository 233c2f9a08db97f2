"""SGLang servers: start them, sample from them, control them."""
