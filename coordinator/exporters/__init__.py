"""A plan in other engines' own flags and files; pure text, written by nobody here."""
