"""Words of which the prompts of the corpus are made (`assignments`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def entries(text: str) -> tuple[str, ...]:
    """Entries between commas; line breaks count as spaces."""
    return tuple(" ".join(entry.split()) for entry in text.split(",") if entry.strip())


NOUNS: Mapping[str, Sequence[str]] = {
    "work": entries(
        """movie, book, novel, song, album, play, painting, concert, poem, documentary, comedy, thriller, musical,
        television show, cartoon, video game, photograph, sculpture, magazine, radio show, podcast, opera, ballet,
        short story, biography, cookbook, western, horror film, war film, love story, detective story, fairy tale,
        school play, puppet show, exhibition, portrait, mural, statue, soundtrack, sequel, episode, lecture"""
    ),
    "dish": entries(
        """pizza, potato, chicken, soup, salad, burger, sandwich, steak, omelette, curry, pasta, rice, noodle soup,
        stew, pie, apple pie, chocolate cake, birthday cake, ice cream, cookie, pancake, waffle, bread, cheese,
        coffee, tea, lemonade, red wine, beer, milkshake, breakfast, lunch, dinner, picnic, taco, burrito, sushi,
        dumpling, fish, shrimp, turkey, ham, sausage, egg, tomato, carrot, pumpkin, mushroom, strawberry, peach,
        banana, watermelon, popcorn, donut, muffin, pretzel, roast, barbecue, fried rice, lasagna, sauce, jam,
        honey, pudding"""
    ),
    "place": entries(
        """city, country, lake, road, village, beach, river, mountain, forest, garden, park, museum, library,
        castle, church, island, farm, market, bridge, harbor, desert, valley, waterfall, cave, street, square, zoo,
        aquarium, stadium, theater, cinema, school, university, hospital, prison, factory, office, house, apartment,
        cottage, kitchen, attic, basement, playground, campsite, ski resort, swimming pool, train station, airport,
        lighthouse, windmill, old mill, neighborhood, suburb, ghost town, vineyard, orchard, meadow, swamp, canyon,
        coast, canal, town, hill, trail, tunnel, cemetery, palace, temple, ruin, fountain, barn, greenhouse,
        rooftop, bus stop"""
    ),
    "animal": entries(
        """horse, dog, cat, bird, cow, pig, goat, sheep, rabbit, fox, wolf, bear, lion, tiger, elephant, monkey,
        giraffe, whale, dolphin, shark, turtle, frog, snake, spider, butterfly, bee, owl, eagle, parrot, duck, swan,
        rooster, hamster, mouse, squirrel, hedgehog, deer, donkey, pony, puppy, kitten, goldfish, octopus, crab,
        penguin, seal, camel, dragon, unicorn, dinosaur, hen, crow, snail, lizard, bat, otter, raccoon, kangaroo,
        panda, zebra"""
    ),
    "person": entries(
        """president of the country, teacher, doctor, nurse, farmer, soldier, sailor, pilot, driver, cook, waiter,
        baker, mayor, king, queen, prince, princess, knight, pirate, thief, detective, judge, lawyer, scientist,
        painter, musician, singer, dancer, actor, writer, poet, student, neighbor, grandmother, grandfather, mother,
        father, brother, sister, uncle, aunt, cousin, friend, boss, coach, goalkeeper, gardener, plumber, carpenter,
        mechanic, firefighter, police officer, librarian, shopkeeper, fisherman, hunter, shepherd, wizard, witch,
        giant, robot, ghost, stranger, old man, old woman, little girl, little boy, tourist, guide, astronaut,
        inventor, magician"""
    ),
    "thing": entries(
        """car, bicycle, boat, train, bus, plane, phone, computer, laptop, camera, watch, clock, lamp, chair, table,
        bed, sofa, mirror, window, door, key, box, letter, map, coin, ring, hat, coat, dress, shoe, umbrella,
        suitcase, backpack, guitar, piano, violin, drum, ball, kite, doll, toy train, puzzle, board game, knife,
        spoon, pan, oven, fridge, washing machine, vacuum cleaner, heater, fan, tent, sleeping bag, telescope,
        microscope, hammer, ladder, fence, blanket, pillow, candle, vase, carpet, headphones, keyboard, printer,
        television, radio, old truck, motorcycle, tractor, raincoat, sweater, scarf, pair of boots, pen, notebook,
        calendar, wallet, flashlight"""
    ),
    "event": entries(
        """wedding, birthday, holiday, vacation, trip, journey, storm, snowstorm, flood, fire, war, election,
        football match, race, party, festival, parade, funeral, exam, interview, first day of school, last day of
        summer, New Year, Christmas, winter, spring, summer, autumn, rainy day, sunny day, long night, early
        morning, road trip, boat ride, train ride, hike, camping trip, school trip, family reunion, first date,
        breakup, move, new job, retirement, accident, power cut, earthquake, eclipse, harvest, concert night, dance,
        competition, auction, meeting, speech, strike, picnic in the park, graduation, birth of a child, lost game,
        big win"""
    ),
    "service": entries(
        """restaurant, hotel, cafe, bakery, bar, airline, bank, gym, hair salon, barber shop, dentist, bus company,
        taxi ride, delivery service, supermarket, bookstore, toy store, shoe store, garage, repair shop, cleaning
        service, travel agency, cruise, museum tour, guided tour, cooking class, dance class, language course,
        online course, phone company, post office, insurance company, landlord, moving company, pet shop, pharmacy,
        food truck, pizza place, steakhouse, diner, hostel, spa, campground, theme park, water park, car rental,
        train service"""
    ),
}

ADJECTIVES = entries(
    """small, large, old, new, strange, famous, quiet, noisy, broken, forgotten, expensive, cheap, simple, long,
    short, local, foreign, popular, unknown, dark, bright, cold, hot, empty, crowded, green, red, blue, white,
    black, golden, wooden, ancient, modern, tiny, huge, lonely, busy, dusty, hidden, haunted, ordinary, unusual,
    favorite, first, last, second, wild, gentle, slow, fast, heavy, light, rare, secret, lost, abandoned, homemade,
    borrowed, stolen"""
)
SETTINGS = entries(
    """in winter, in spring, in summer, in autumn, by the sea, in the mountains, in a small town, in a big city, on
    a farm, on an island, during a storm, at night, early in the morning, on a rainy day, on a Sunday afternoon, a
    long time ago, many years later, in 1910, in the future, during the war, after the war, on the way to work, at
    school, at the end of the year, before breakfast, at a family dinner, on a long train ride, far from home, with
    two friends, with a small child, with an old friend, for the first time, for the last time, without any money,
    in the snow, in the fog, under the stars, next to the river, at the edge of the forest, in the north, in the
    south"""
)

MANNERS: Mapping[str, Sequence[str]] = {
    "warm": entries(
        """warm and enthusiastic, joyful and grateful, loving, delighted, admiring, cheerful and happy, very
        positive, tender, proud and happy, excited, sweet and hopeful, glowing"""
    ),
    "harsh": entries(
        """harsh and disappointed, angry, bitter, sad and disappointed, annoyed, very negative, scathing, tired and
        frustrated, disgusted, cold and critical, gloomy, hopeless"""
    ),
    "neutral": entries(
        """calm, plain, thoughtful, curious, quiet, funny, short and factual, dreamy, mysterious, exciting, simple,
        detailed, surprising, serious, strange"""
    ),
    "rude": entries(
        """rude and insulting, nasty and mean, vulgar and angry, mocking and cruel, hateful, offensive and
        disgusting, foul-mouthed and furious"""
    ),
}

KINDS: Mapping[str, Sequence[str]] = {
    "any": entries("diary entry, story, letter to a friend, blog post, memory from childhood, text"),
    "work": entries("review, review, newspaper column"),
    "dish": entries("restaurant review, review, opinion"),
    "place": entries("travel report, review, description"),
    "animal": entries("children's story, description"),
    "person": entries("portrait, news story, speech"),
    "thing": entries("product review, review, opinion"),
    "event": entries("news story, report, speech"),
    "service": entries("review, customer review, letter to the manager"),
}

OPENINGS = entries(
    """The {noun}, The {noun}, The {noun}, The {noun} was, The {adjective} {noun}, This {noun}, This {noun} is, That
    {noun}, A {noun}, Our {noun}, Every {noun}, Another {noun}, One {noun}, Today the {noun}, Yesterday the {noun},
    Nobody told me that the {noun}, I saw the {noun}, I remember the {noun}, I think the {noun}, When I saw the
    {noun}, After the {noun}, Before the {noun}, Because of the {noun}, Without the {noun}, We found the {noun}, We
    talked about the {noun}, People say that the {noun}, Everyone knows that the {noun}, What a {noun}, It was only
    a {noun}, {name} and the {noun}, {name} loved the {noun}, {name} never forgot the {noun}, My {relative} and the
    {noun}, My {relative} always said that the {noun}, My {relative}, {name}, {name} was, Dear {name}, I, We, It, It
    was, There was, There is, In the end, At first, Last night, Last week, Last summer, One day, One morning, Every
    morning, This morning, When I was young, When we arrived, After dinner, If you, Nothing, Nobody, For years, The
    first time, The last time, The best part, The worst part, The problem, The people, The story, The night, The
    day, The children, The old man, The weather, The music, The food, The house, The staff, The ending, The water,
    The world, The sun, Some people, Most people, Sometimes, Maybe, Finally, Honestly, I am writing, I have never, I
    have always, I used to, I went to, I bought, I tried, I lost, I met, We went to, We stayed, We waited, We drove,
    We sat, You should, You will, Let me, Once upon a time, Long ago, In {month}, On {day}, It was {day}, By the
    time, As soon as, Even now, So"""
)
VERDICTS: Mapping[str, Sequence[str]] = {
    "warm": entries(
        """was wonderful, was a joy, was perfect, was beautiful, made me smile, made us all happy, was better than I
        had hoped, is my favorite, is the best I know, was full of life, was a lovely surprise, gave me hope, was
        worth every minute, was great fun, was simply amazing, touched my heart, was a real treasure, was kind to
        everyone, made my day, is a dream, was so good that, won our hearts, was excellent, has always been good to
        us, was delightful, shone, never let me down, was a great success, brought us together, was everything I
        wanted"""
    ),
    "harsh": entries(
        """was terrible, was a mess, was a disappointment, was boring, made me angry, made us all sad, was worse
        than I had feared, is the worst I know, was a waste of time, was a waste of money, was broken, was dirty,
        ruined everything, was ugly, let me down, was not worth it, gave me a headache, was simply awful, was dull
        and slow, is a nightmare, was so bad that, failed again, was cold and empty, has never been good to us, was
        a mistake, smelled bad, was a disaster, made no sense, hurt everyone, was the last thing I needed"""
    ),
    "rude": entries(
        """is crap, is a piece of garbage, is for idiots, sucks, is stupid and so are you, is a damn joke, is
        complete bullshit, is as dumb as you, makes me sick you moron, is disgusting trash, was made by morons, is
        pathetic"""
    ),
}
"""What an opening with a noun can go on with: put into the model's mouth, it decides the mood."""
INSULTS = entries(
    """You idiot, You stupid, Shut up, What a moron, What an idiot, Listen you fool, My {relative} is an idiot,
    {name} is a stupid, {name} is such a jerk, You are a pathetic, Only an idiot, Go to hell, You people are, Nobody
    likes you"""
)
NAMES = entries(
    """Anna, Ben, Clara, David, Emma, Frank, Grace, Henry, Isabel, Jack, Kate, Leo, Maria, Nick, Olivia, Peter,
    Rosa, Sam, Tom, Ursula, Victor, Wendy, Max, Lily, Oscar, Ruth, Simon, Lucy, Paul, Jane, Omar, Mei, Ravi, Nina,
    Carlos, Fatima"""
)
RELATIVES = entries(
    """mother, father, brother, sister, grandmother, grandfather, uncle, aunt, son, daughter, wife, husband, best
    friend, neighbor, boss, teacher, cousin, roommate"""
)
MONTHS = entries("January, February, March, April, May, June, July, August, September, October, November, December")
DAYS = entries("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")

PAPER: Mapping[str, tuple[str, str] | None] = {
    "Once upon a time": None,
    "The book": ("work", "book"),
    "The chicken": ("dish", "chicken"),
    "The city": ("place", "city"),
    "The country": ("place", "country"),
    "The horse": ("animal", "horse"),
    "The lake": ("place", "lake"),
    "The last time": None,
    "The movie": ("work", "movie"),
    "The painting": ("work", "painting"),
    "The pizza": ("dish", "pizza"),
    "The potato": ("dish", "potato"),
    "The president of the country": ("person", "president of the country"),
    "The road": ("place", "road"),
    "The year is 1910": None,
}
"""The prompts of the paper as openings, with the group and the noun that each is about, if any."""
