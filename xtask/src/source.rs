//! Rust source as tokens: comments, string literals and names with their lines, and which of them belong to tests.

use ra_ap_rustc_lexer::{FrontmatterAllowed, LiteralKind, TokenKind, tokenize};

/// Tokens of one file.
pub(crate) struct Source<'a> {
    tokens: Vec<Token<'a>>,
}

struct Token<'a> {
    kind: TokenKind,
    text: &'a str,
    line: usize,
}

/// A part of the source that holds words.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Piece<'a> {
    /// A comment, with its marks.
    Comment(&'a str),
    /// A string literal, without its quotation marks.
    Text(&'a str),
    /// An identifier or keyword.
    Name(&'a str),
}

impl<'a> Source<'a> {
    pub(crate) fn new(text: &'a str) -> Self {
        let (mut at, mut line) = (0, 1);
        let tokens = tokenize(text, FrontmatterAllowed::No).filter_map(|token| {
            let end = at + usize::try_from(token.len).ok()?;
            let (text, begins) = (text.get(at..end)?, line);
            at = end;
            line += text.matches('\n').count();
            let kind = token.kind;
            (kind != TokenKind::Whitespace).then_some(Token { kind, text, line: begins })
        });
        Self { tokens: tokens.collect() }
    }

    /// Words of the code that is not compiled for tests alone, with their lines.
    pub(crate) fn product(&self) -> impl Iterator<Item = (usize, Piece<'a>)> {
        let mut pieces = Vec::new();
        let mut at = 0;
        while let Some(token) = self.tokens.get(at) {
            let attribute = self.attribute(at);
            if attribute.is_some_and(|(is, _)| is == "cfg(test)") {
                at = self.end_of_item(at);
                continue;
            }
            at += 1;
            pieces.extend(token.piece().map(|piece| (token.line, piece)));
        }
        pieces.into_iter()
    }

    /// Names of test functions, with their lines.
    pub(crate) fn tests(&self) -> impl Iterator<Item = (usize, &'a str)> {
        (0..self.tokens.len()).filter_map(|at| {
            let (is, mut next) = self.attribute(at)?;
            if !(is == "test" || is == "tokio::test" || is.starts_with("tokio::test(")) {
                return None;
            }
            while self.tokens.get(next)?.text != "fn" {
                // A test is a function with nothing before it but further attributes and `async`.
                next = match self.attribute(next) {
                    Some((_, end)) => end,
                    None => next + 1,
                };
            }
            let name = self.tokens.get(next + 1)?;
            Some((name.line, name.text))
        })
    }

    /// The text of the attribute that begins at a token, without blanks, and the token after it.
    fn attribute(&self, at: usize) -> Option<(String, usize)> {
        if self.tokens.get(at)?.kind != TokenKind::Pound
            || self.tokens.get(at + 1)?.kind != TokenKind::OpenBracket
        {
            return None;
        }
        let mut text = String::new();
        let mut depth = 0;
        for (index, token) in self.tokens.iter().enumerate().skip(at + 1) {
            match token.kind {
                TokenKind::OpenBracket => depth += 1,
                TokenKind::CloseBracket => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                return Some((text, index + 1));
            }
            if index > at + 1 {
                text += token.text;
            }
        }
        None
    }

    /// The token after the item that begins at a token: after its semicolon or its block.
    fn end_of_item(&self, at: usize) -> usize {
        let mut at = at;
        while let Some((_, end)) = self.attribute(at) {
            at = end;
        }
        let mut depth = 0;
        while let Some(token) = self.tokens.get(at) {
            at += 1;
            match token.kind {
                TokenKind::OpenBrace | TokenKind::OpenParen | TokenKind::OpenBracket => depth += 1,
                TokenKind::CloseParen | TokenKind::CloseBracket => depth -= 1,
                TokenKind::CloseBrace => {
                    depth -= 1;
                    if depth <= 0 {
                        break;
                    }
                }
                TokenKind::Semi | TokenKind::Comma if depth == 0 => break,
                _ => {}
            }
        }
        at
    }
}

impl<'a> Token<'a> {
    fn piece(&self) -> Option<Piece<'a>> {
        use LiteralKind::{ByteStr, CStr, RawByteStr, RawCStr, RawStr, Str};
        match self.kind {
            TokenKind::LineComment { .. } | TokenKind::BlockComment { .. } => Some(Piece::Comment(self.text)),
            TokenKind::Literal {
                kind:
                    Str { .. } | ByteStr { .. } | CStr { .. } | RawStr { .. } | RawByteStr { .. } | RawCStr { .. },
                ..
            } => {
                let begin = self.text.find('"')? + 1;
                let end = self.text.rfind('"')?;
                self.text.get(begin..end).map(Piece::Text)
            }
            TokenKind::Ident | TokenKind::RawIdent => Some(Piece::Name(self.text)),
            _ => None,
        }
    }
}
