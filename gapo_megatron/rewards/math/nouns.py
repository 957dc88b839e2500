"""Nouns that are counted, and other words after a number that do not change its value.

They come from GSM8K's solutions (words after the last number, twice or more) and from DeepScaleR's
problems (words after "how many"). Words that may change a value (hundreds, eighths, zeros, dozens,
quarters) are never in a list.
"""

from __future__ import annotations

import re

from gapo_megatron.rewards.math.functions import NAMES

_NOUNS = """
acorns adults alligators animals ants apples apps arrangements articles artworks bags balloons
balls bananas bandages barrels bars baseballs basketballs baskets batches beads beakers bees
beetles berries bills birds biscuits bits blocks blueberries boats bones books bottles bouquets
boxes boys bracelets bricks brothers brownies bugs buildings bunnies buses bushels bushes
buttons bytes cakes calls calories campers candies candles candy cans caps cards carnations cars
cartons cases cats cells chairs characters chickens children chips chocolate chocolates choices
chords circles clips clothes coins colorings colors colours combinations comics computers
containers cookies corn couples cousins cows crackers crates crayons crickets cupcakes customers
cuts daisies dates decorations desserts diagonals diamonds dice digits dishes distributions
divisors dogs dolls donuts doors dots doughnuts dresses driveways ducks earrings ears edges eggs
elements elephants emails employees entries envelopes episodes erasers eyes faces factors
families feathers females fireworks fish fishes flags flavors flights floors flowers flyers
followers friends fries frogs fruit fruits functions gallons games gb geese gifts girls glasses
gnomes goals goats gold goldfish grains grandchildren grapes groups guests gumballs guppies
handshakes hats heads hens hexagons holes homes horses houses insects instances integers items
jars jellybeans jellyfish jewels jumps kb kernels keys kids kittens knights lambs laps leaves
legos legs lemons lessons letters levels liars lights lines lions loads loaves lockers logs
lollipops machines mangoes mappings marbles markers marks marshmallows matches matchsticks mb
meals meatballs medals members men messages methods mice minnows mistakes moves movies muffins
mushrooms nails necklaces newspapers nights notebooks novels numbers nuts objects oranges
orderings orders oreos outcomes outfits oysters packages packs pages paintings pairs pancakes
papers parents parts passengers passwords pastries paths patterns peaches peanuts pebbles
pencils pens people permutations person pesos petals pets phones photos pictures pieces pies
pills pizza pizzas planks plans plants plates players points polygons polynomials portions
positions possibilities posters potatoes presents primes problems programs puppies pyramids
quadruples questions rabbits racers rats rectangles regions revolutions rhombuses rocks rolls
rooms roses rounds routes rows sandwiches scarves scoops seashells seats sections seeds segments
selections sequences servings sets sharks sheep sheets shells shirts shoes shots sides singers
skateboards skips slices snacks socks sodas solutions songs spokes spoons spots squares stairs
stamps stars states steaks steps stickers sticks strawberries straws strings stripes students
subsets sweets tables tablespoons tadpoles tanks teachers teams teaspoons teeth tents terms
texts tickets tiles tins tires tissues toads tokens tomatoes toothpicks touchdowns towels toys
trees triangles triples triplets trips trucks tubs turns turtles units values vegetables
vehicles vertices videos visitors voters votes water watermelons ways whales wheels whiskers
windows wins women words workers
atoms bombs magnitudes molecules photons pulses electrons protons ions
area babies bikes buckets cake child cities cubes die flour goose juice leaf loaf man mango milk
money monkeys mouse pentagons potato rice roots scarf sugar them tomato tooth vertex volume
woman
"""
_MODIFIERS = """
additional black blue colored cubic different distinct extra female gold green ice large
lattice male new ordered pink possible red silver small sq square stuffed unique unordered video
white wooden yellow
"""
_NUMERIC = "complex nonnegative nonreal positive prime rational real whole"
_LINKS = "a an at every for in of on per the"
_ENDINGS = "altogether approximately away deep high left leftover long old remaining tall wide"

NOUNS = frozenset(_NOUNS.split())
MODIFIERS = frozenset(_MODIFIERS.split())
"""Words before a noun."""
NUMERIC = frozenset(_NUMERIC.split())
"""Words before a noun, not before a unit: 3 positive roots, but not 3 positive metres."""
LINKS = frozenset(_LINKS.split())
"""Words between two nouns or units: miles per hour, eggs a day, cups of water."""
ENDINGS = frozenset(_ENDINGS.split())
"""Words after a noun, or alone: 5 left. `total` is also a modifier, `each` also a link."""
_FUNCTIONS = frozenset(NAMES.split("|"))

CHANGES_VALUE = re.compile(
    r"\b(?:\w*(?:hundred|thousand|[mbtr]illion)(?:th)?s?|dozens?|scores?|gross|tens|lakhs?|crores?"
    r"|\w*(?:four|fif|six|even|eigh|nin|ten|elf|een|tie)ths?|half|halves|thirds?|quarters?"
    r"|percent\w*|double[sd]?|triple[sd]?|squared?|cubed?|factorial|infinity|negative|minus|plus"
    r"|times|point|mod|over|under|above|below|and|or|not|no|less|more|fewer|most|least|than"
    r"|zeros?|one|two|three|four|five|six|seven|eight|nine|ten)\b",
    re.IGNORECASE,
)
"""Words that change a value, as in 3 eighths: with them a verdict is wrong, not unknown."""


def plural(noun: str) -> str:
    """The regular plural; the lists have the irregular ones."""
    if re.search(r"[^aeiou]y$", noun):
        return f"{noun[:-1]}ies"
    return f"{noun}es" if re.search(r"(?:[sxz]|[cs]h)$", noun) else f"{noun}s"


def is_noun(word: str) -> bool:
    """Whether the list has the word or its plural; `logs` may be wood, but `log` is a function."""
    return word in NOUNS or (word not in _FUNCTIONS and plural(word) in NOUNS)


__all__ = [
    "CHANGES_VALUE",
    "ENDINGS",
    "LINKS",
    "MODIFIERS",
    "NOUNS",
    "NUMERIC",
    "is_noun",
    "plural",
]
