"""Shows a run's folder to a person: report.html, one file that opens offline, and the state of all runs in a folder.

metrics.py   metrics.jsonl as columns, thinned           state.py      where a run stands
record.py    all else that a folder tells                pictures.py   grids and films, small enough for a page
page.py      the page: page.html, filled in
"""
