"""One HTTP application that serves a target by its own engine or by running engines, in OpenAI's protocol."""
