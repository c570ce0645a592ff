//! Numbers with their nouns and verbs, as people read them.

/// `1 member`, `2 members`.
pub fn members(count: u32) -> String {
    match count {
        1 => "1 member".to_owned(),
        _ => format!("{count} members"),
    }
}

/// `is` of one, `are` of several.
pub fn are(count: u32) -> &'static str {
    if count == 1 { "is" } else { "are" }
}

/// `exists` of one, `exist` of several.
pub(crate) fn exist(count: u32) -> &'static str {
    if count == 1 { "exists" } else { "exist" }
}
