# Functions for the scripts that bring what tests need: where one could not, it leaves a sentence, and only with that
# sentence may tests skip for want of it under `make test` (tests/support/skips.py).
#
#   is_here NAME             # it could
#   is_absent NAME SENTENCE  # it could not, and this is why

is_here() {
  rm -f "build/absent/$1"
}

is_absent() {
  mkdir -p build/absent
  echo "$2" | tee "build/absent/$1"
}
