"""An answer for a person: a screen, a page, a notebook, and several beside one another."""
