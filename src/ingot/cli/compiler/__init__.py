"""What the compiler's commands do, a file a command or a group of small ones; compiler_commands.py declares them."""
