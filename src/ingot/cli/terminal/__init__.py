"""How results, progress, notes and errors are printed. No command belongs here."""
