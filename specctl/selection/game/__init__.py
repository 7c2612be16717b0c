"""The game between a policy and the rounds of decoding: what is played, shown and learnt, and when."""
