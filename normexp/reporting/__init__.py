"""From records to tables, figures and a page; without torch."""
