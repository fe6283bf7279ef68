"""How good pictures are: networks that turn images into features, and figures that compare sets of features."""
