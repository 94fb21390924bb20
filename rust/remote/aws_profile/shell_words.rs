//! Words of a command or of a section's title, separated and quoted as in a POSIX shell.

/// Splits text into words, as `shlex.split` of Python does. Returns `None` if a quote is not closed or the text ends with
/// a backslash.
///
/// ```
/// use fst::remote::aws_profile::shell_words;
/// assert_eq!(shell_words::split(r#"a "b c"  'd"e' f\ g"#).unwrap(), ["a", "b c", "d\"e", "f g"]);
/// assert_eq!(shell_words::split("a 'b"), None);
/// ```
pub fn split(text: &str) -> Option<Vec<String>> {
    let mut words = Vec::new();
    // `None` between words: a word may be empty if it is quoted.
    let mut word: Option<String> = None;
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match character {
            '\'' => {
                let (quoted, rest) = characters.as_str().split_once('\'')?;
                word.get_or_insert_default().push_str(quoted);
                characters = rest.chars();
            }
            '"' => {
                let quoted = word.get_or_insert_default();
                loop {
                    match characters.next()? {
                        '"' => break,
                        '\\' => match characters.next()? {
                            escaped @ ('"' | '\\') => quoted.push(escaped),
                            other => quoted.extend(['\\', other]),
                        },
                        other => quoted.push(other),
                    }
                }
            }
            '\\' => word.get_or_insert_default().push(characters.next()?),
            ' ' | '\t' | '\r' | '\n' => words.extend(word.take()),
            other => word.get_or_insert_default().push(other),
        }
    }
    words.extend(word);
    Some(words)
}
