"""The page that shows a federation at work, and the report that is the same page, frozen."""
