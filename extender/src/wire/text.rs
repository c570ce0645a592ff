//! Strings and quantity maps that borrow from the request body wherever JSON allows it. Reading only.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};

/// A JSON string, borrowed from the body unless it holds escapes.
#[derive(Clone, PartialEq, Eq)]
pub struct Text<'a>(Cow<'a, str>);

impl Text<'_> {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl<'a> From<&'a str> for Text<'a> {
    fn from(text: &'a str) -> Self {
        Self(Cow::Borrowed(text))
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(TextVisitor)
    }
}

struct TextVisitor;

impl<'de> Visitor<'de> for TextVisitor {
    type Value = Text<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Text<'de>, E> {
        Ok(Text(Cow::Borrowed(text)))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Text<'de>, E> {
        Ok(Text(Cow::Owned(text.to_owned())))
    }
}

/// A resource list: names and quantities as written. JSON numbers are taken as well as strings.
#[derive(Debug, Default)]
pub struct Quantities<'a>(Vec<(Text<'a>, Text<'a>)>);

impl Quantities<'_> {
    /// Names and quantities, as written.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, quantity)| (name.as_str(), quantity.as_str()))
    }

    /// The resources.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| name.as_str())
    }

    /// The quantity of a resource, as written.
    pub fn get(&self, resource: &str) -> Option<&str> {
        self.0.iter().find(|(name, _)| name.as_str() == resource).map(|(_, quantity)| quantity.as_str())
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Quantities<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(QuantitiesVisitor)
    }
}

struct QuantitiesVisitor;

impl<'de> Visitor<'de> for QuantitiesVisitor {
    type Value = Quantities<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of resources to quantities")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries = Vec::new();
        while let Some((name, Quantity(quantity))) = map.next_entry::<Text<'de>, Quantity<'de>>()? {
            entries.push((name, quantity));
        }
        Ok(Quantities(entries))
    }
}

struct Quantity<'a>(Text<'a>);

impl<'de: 'a, 'a> Deserialize<'de> for Quantity<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(QuantityVisitor)
    }
}

struct QuantityVisitor;

impl QuantityVisitor {
    fn number<'de>(number: impl fmt::Display) -> Quantity<'de> {
        Quantity(Text(Cow::Owned(number.to_string())))
    }
}

impl<'de> Visitor<'de> for QuantityVisitor {
    type Value = Quantity<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a quantity")
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Self::Value, E> {
        TextVisitor.visit_borrowed_str(text).map(Quantity)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        TextVisitor.visit_str(text).map(Quantity)
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Self::Value, E> {
        Ok(Self::number(number))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<Self::Value, E> {
        Ok(Self::number(number))
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<Self::Value, E> {
        Ok(Self::number(number))
    }
}
