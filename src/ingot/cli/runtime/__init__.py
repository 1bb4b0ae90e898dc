"""What the runtime's commands do, a file a command and its helpers; runtime_commands.py declares them."""
