//! An XML document whose elements know their positions in the text, and edits of that text.
//!
//! An edit replaces a range of the text. The rest never passes through an XML writer, so it remains unchanged,
//! including white space.

use std::ops::Range;

use quick_xml::Reader;
use quick_xml::escape::resolve_predefined_entity;
use quick_xml::events::{BytesStart, Event};

/// Maximum nesting of elements.
const DEPTH_MAX: usize = 128;

/// Reason why a text cannot be used as XML.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum XmlError {
    #[error("at byte {at}: {what}")]
    Malformed { at: usize, what: String },
    #[error("it is truncated: <{element}> has no end tag")]
    Truncated { element: String },
    #[error("it is empty")]
    Empty,
}

/// An XML element.
#[derive(Debug, Clone, Default)]
pub struct Element {
    /// Name with its prefix: `qemu:commandline`.
    pub name: String,
    /// Attributes, in order.
    pub attributes: Vec<(String, String)>,
    /// Text of the element without that of its children, trimmed.
    pub text: String,
    /// Child elements.
    pub children: Vec<Element>,
    /// Range of the element in the text.
    pub span: Range<usize>,
    /// Range of its start tag.
    pub tag: Range<usize>,
}

impl Element {
    /// Parses the root element, with all of its content.
    ///
    /// # Errors
    /// See [`XmlError`].
    pub fn parse(text: &str) -> Result<Self, XmlError> {
        let mut reader = Reader::from_str(text);
        let mut open: Vec<Self> = Vec::new();
        loop {
            let begin = reader.buffer_position() as usize;
            let malformed = |what: String| XmlError::Malformed { at: begin, what };
            let event = reader.read_event().map_err(|error| malformed(error.to_string()))?;
            let end = reader.buffer_position() as usize;
            let ended = match event {
                Event::Start(tag) if open.len() >= DEPTH_MAX => {
                    let name = String::from_utf8_lossy(tag.name().as_ref()).into_owned();
                    return Err(malformed(format!("<{name}> is nested in more than {DEPTH_MAX} other elements")));
                }
                Event::Start(tag) => {
                    open.push(Self::from_tag(&tag, begin..end)?);
                    None
                }
                Event::Empty(tag) => Some(Self::from_tag(&tag, begin..end)?),
                Event::End(_) => open.pop(),
                Event::Text(part) => {
                    let part = part.decode().map_err(|error| malformed(error.to_string()))?;
                    append_text(&mut open, &part);
                    None
                }
                Event::CData(part) => {
                    let part = part.decode().map_err(|error| malformed(error.to_string()))?;
                    append_text(&mut open, &part);
                    None
                }
                Event::GeneralRef(entity) => {
                    let entity_name = entity.decode().map_err(|error| malformed(error.to_string()))?;
                    match entity.resolve_char_ref().map_err(|error| malformed(error.to_string()))? {
                        Some(letter) => append_text(&mut open, letter.encode_utf8(&mut [0; 4])),
                        None => match resolve_predefined_entity(&entity_name) {
                            Some(letters) => append_text(&mut open, letters),
                            None => return Err(malformed(format!("the entity &{entity_name}; is unknown"))),
                        },
                    }
                    None
                }
                Event::Eof => {
                    return Err(match open.pop() {
                        Some(element) => XmlError::Truncated { element: element.name },
                        None => XmlError::Empty,
                    });
                }
                Event::Decl(_) | Event::PI(_) | Event::DocType(_) | Event::Comment(_) => None,
            };
            let Some(mut ended) = ended else { continue };
            ended.span.end = end;
            ended.text = ended.text.trim().to_owned();
            match open.last_mut() {
                Some(parent) => parent.children.push(ended),
                None => return Ok(ended),
            }
        }
    }

    fn from_tag(tag: &BytesStart<'_>, place: Range<usize>) -> Result<Self, XmlError> {
        let malformed = |what: String| XmlError::Malformed { at: place.start, what };
        let mut attributes = Vec::new();
        for attribute in tag.attributes() {
            let attribute = attribute.map_err(|error| malformed(error.to_string()))?;
            let value = attribute.unescape_value().map_err(|error| malformed(error.to_string()))?;
            let key = String::from_utf8_lossy(attribute.key.as_ref()).into_owned();
            attributes.push((key, value.into_owned()));
        }
        Ok(Self {
            name: String::from_utf8_lossy(tag.name().as_ref()).into_owned(),
            attributes,
            tag: place.clone(),
            span: place,
            ..Self::default()
        })
    }

    /// Returns the first child with this name.
    pub fn child(&self, name: &str) -> Option<&Self> {
        self.children_named(name).next()
    }

    /// Returns all children with this name.
    pub fn children_named(&self, name: &str) -> impl Iterator<Item = &Self> {
        self.children.iter().filter(move |child| child.name == name)
    }

    /// Returns the value of an attribute.
    pub fn attribute(&self, name: &str) -> Option<&str> {
        let found = self.attributes.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str())
    }

    /// Returns the element's source text.
    pub fn source<'a>(&self, text: &'a str) -> &'a str {
        &text[self.span.clone()]
    }
}

fn append_text(open: &mut [Element], part: &str) {
    if let Some(element) = open.last_mut() {
        element.text.push_str(part);
    }
}

/// Edits of a text.
#[derive(Debug, Default)]
pub struct Edits(Vec<(Range<usize>, String)>);

impl Edits {
    /// Returns whether there are no edits.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Replaces a range. Ranges must not overlap.
    pub fn replace(&mut self, place: Range<usize>, replacement: impl Into<String>) {
        self.0.push((place, replacement.into()));
    }

    /// Removes an element, with the indentation and line break before it.
    pub fn remove(&mut self, text: &str, element: &Element) {
        let before = &text[..element.span.start];
        let start = match before.trim_end_matches([' ', '\t']) {
            line if line.ends_with('\n') => line.len() - 1,
            _ => before.len(),
        };
        self.replace(start..element.span.end, "");
    }

    /// Inserts lines after an element, each with the element's indentation.
    pub fn insert_after(&mut self, text: &str, element: &Element, lines: &str) {
        let end = element.span.end;
        self.replace(end..end, indent_lines(lines, indentation(text, element)));
    }

    /// Inserts lines before an element's end tag; the element must not have the form `<name/>`.
    pub fn append_child(&mut self, text: &str, element: &Element, lines: &str) {
        let inner = indentation(text, element).to_owned() + "  ";
        let end = match element.children.last() {
            Some(last) => last.span.end,
            None => element.tag.end,
        };
        self.replace(end..end, indent_lines(lines, &inner));
    }

    /// Returns the text with all edits applied.
    pub fn apply(mut self, text: &str) -> String {
        // An insertion precedes a replacement that starts at the same position; insertions at one position keep their
        // order.
        self.0.sort_by_key(|(place, _)| (place.start, place.end));
        let (mut edited, mut at) = (String::with_capacity(text.len()), 0);
        for (place, by) in self.0 {
            debug_assert!(at <= place.start, "two edits overlap");
            edited.push_str(&text[at..place.start]);
            edited.push_str(&by);
            at = place.end;
        }
        edited + &text[at..]
    }
}

/// Returns each line on a new line with this indentation.
fn indent_lines(lines: &str, indentation: &str) -> String {
    lines.lines().map(|line| format!("\n{indentation}{line}")).collect()
}

/// Returns the white space before an element, if it is the first on its line.
pub fn indentation<'a>(text: &'a str, element: &Element) -> &'a str {
    let before = &text[..element.span.start];
    let line = before.rfind('\n').map_or(0, |at| at + 1);
    let before = &before[line..];
    match before.trim_matches([' ', '\t']) {
        "" => before,
        _ => "",
    }
}

/// Returns a value in single quotes, escaped.
pub fn quote(value: &str) -> String {
    let mut text = String::with_capacity(value.len() + 2);
    text.push('\'');
    for letter in value.chars() {
        match letter {
            '&' => text.push_str("&amp;"),
            '<' => text.push_str("&lt;"),
            '>' => text.push_str("&gt;"),
            '\'' => text.push_str("&apos;"),
            '\n' | '\r' | '\t' => text.push_str(&format!("&#{};", u32::from(letter))),
            letter => text.push(letter),
        }
    }
    text.push('\'');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "<?xml version='1.0'?>\n<!-- mine -->\n<a x='1 &lt; 2' y=\"&#x41;\">\n  <b> one &amp; <!-- no --> two </b>\n  <c:d/>\n  <b/>\n</a>\n";

    #[test]
    fn parsed_elements_have_positions() {
        let a = Element::parse(TEXT).expect("is XML");
        assert_eq!((a.attribute("x"), a.attribute("y")), (Some("1 < 2"), Some("A")));
        let names: Vec<&str> = a.children.iter().map(|child| child.name.as_str()).collect();
        assert_eq!(names, ["b", "c:d", "b"]);
        assert_eq!(a.child("b").expect("is there").text, "one &  two");
        assert_eq!(a.child("c:d").expect("is there").source(TEXT), "<c:d/>");
        assert!(a.source(TEXT).starts_with("<a x=") && a.source(TEXT).ends_with("</a>"));
    }

    #[test]
    fn edits_leave_other_text_unchanged() {
        let a = Element::parse(TEXT).expect("is XML");
        let mut edits = Edits::default();
        edits.remove(TEXT, a.child("c:d").expect("is there"));
        edits.insert_after(TEXT, &a.children[0], "<e>\n  <f/>\n</e>");
        edits.append_child(TEXT, &a, "<g/>");
        let expected = TEXT.replace("\n  <c:d/>", "\n  <e>\n    <f/>\n  </e>").replace("\n  <b/>", "\n  <b/>\n  <g/>");
        assert_eq!(edits.apply(TEXT), expected);
        assert_eq!(Edits::default().apply(TEXT), TEXT);
    }

    #[test]
    fn invalid_or_deep_xml_is_refused() {
        for text in ["", "x", "<a>", "<a><b></a>", "<a x=1/>", "<a>&mine;</a>", "<a x='&mine;'/>", "<a x='1' x='2'/>"] {
            assert!(Element::parse(text).is_err(), "{text}");
        }
        let deep = "<a>".repeat(1_000_000);
        assert!(matches!(Element::parse(&deep), Err(XmlError::Malformed { .. })));
    }

    #[test]
    fn quoted_value_parses_back() {
        let value = "a'b\"c<d>&e\tf\ng";
        let read = Element::parse(&format!("<a x={}/>", quote(value))).expect("is XML");
        assert_eq!(read.attribute("x"), Some(value));
    }
}
