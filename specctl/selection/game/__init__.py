"""Game between a policy and the rounds of decoding: its rules, its feedback and when it comes, rewards and losses."""
