"""The report: HTML and Markdown, charts, numbers as text."""
