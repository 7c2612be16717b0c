"""Family `medusa`: one head per draft depth, which reads only the target's last hidden state."""
