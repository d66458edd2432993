"""What a run did: its journal, and reports made from it alone."""
