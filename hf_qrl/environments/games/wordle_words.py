# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The 400 words of our Wordle: ordinary English ones, chosen for this library."""

WORDS: tuple[str, ...] = tuple(
    """
    about above actor admit adult after again agent agree ahead alarm album alike alive allow alone along among angel
    angry ankle apart apple apply arena argue arrow aside avoid awake award aware bacon badge basic basin began begin
    being belly below berry birth black blade blame blank blast blaze bless block blood bloom board boast booth brain
    brand brave bread breed brick bride brief bring broad brook brush bunch burst cabin cable camel carry cause chain
    chair chalk cheap cheek chess chest chill chose claim class clean clear clerk cliff clock cloth cloud coach coast
    couch could count court crane crash cream creek crisp curve cycle daily depth diary dirty doubt dough draft dream
    dress drift drill eager eagle early eight elbow empty enemy entry equal error essay event exact exist extra fable
    faith false fancy feast fence fever field fifty fight final flame flash fleet flesh float flood floor flour fluid
    focus force forth found frame fresh front fruit funny ghost given glass glory grace grain grand grant grass grave
    great group guard guess guest happy harsh heart heavy hedge hello honey honor horse hotel house human humor hurry
    ideal image input issue jewel joint juice knife knock label labor large later layer learn lemon level light limit
    local logic lucky magic major maple march match maybe mayor mercy merry midst minor model month moral motor mount
    mouth movie music never night noble noise novel nurse ocean offer onion outer owner panel paper pasta patch peace
    peach pearl phase phone piano piece pilot pitch plane plant plate point porch pound power press price pride prime
    print prize proud queen quiet quite quote radio raise ratio reach ready relax reply ridge right river roast robot
    rough round royal rural salad sauce scale scene scent scope sense serve seven shade shake shape share sharp sheep
    sheet shelf shell shift shirt shock shout silly skill sleep slide smart smile smoke snake solar solve sorry sound
    south space speak spend spoon sport staff stage stair stand start steel stick stone store storm style sugar sunny
    sweet swing table teach thank there thick thing third three throw tiger tight title today tooth total tower trace
    track trade trail treat trend trial tribe trick truck truly twice uncle under union until upper usual valid value
    video visit vital waste watch water weigh wheat wheel where while white whole woman world worry worth would write
    wrong
    """.split()
)
