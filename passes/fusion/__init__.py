"""What every target begins with: constants folded, dead nodes gone, nodes that belong together joined."""
