//! QEMU's `key=value,key=value` lists, as in `-drive`, `-device` and `-object`.
//!
//! The rules are those of QEMU's `util/qemu-option.c`: a comma within a value is doubled, `key` alone means `key=on`,
//! `nokey` means `key=off`, and if a key is given twice, the last value is used. Some options imply the key of their
//! first part: `-device virtio-blk-pci,...` is `driver=virtio-blk-pci,...`.

use std::fmt;

/// An ordered list of keys and values. It prints as text that QEMU parses as the same list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyValues {
    pairs: Vec<(String, String)>,
    /// The first pair is printed without its key.
    implied_first: bool,
}

impl KeyValues {
    /// Parses a list; `implied` is the key of a first part without one.
    pub fn parse(text: &str, implied: Option<&str>) -> Self {
        let mut list = Self::default();
        let mut rest = text;
        while !rest.is_empty() {
            let key_end = rest.find(['=', ',']).unwrap_or(rest.len());
            let has_value = rest[key_end..].starts_with('=');
            if has_value {
                let (value, remainder) = split_value(&rest[key_end + 1..]);
                list.push(&rest[..key_end], value);
                rest = remainder;
                continue;
            }
            if let (true, Some(key)) = (list.pairs.is_empty(), implied) {
                let (value, remainder) = split_value(rest);
                list.push(key, value);
                list.implied_first = true;
                rest = remainder;
                continue;
            }
            match rest[..key_end].strip_prefix("no") {
                Some(key) => list.push(key, "off".to_owned()),
                None => list.push(&rest[..key_end], "on".to_owned()),
            }
            rest = rest.get(key_end + 1..).unwrap_or("");
        }
        list
    }

    /// Parses a JSON object, which `-device` and `-blockdev` accept as well: a nested value gets the key
    /// `outer.inner`. `None` if the text is not valid JSON.
    pub fn parse_json(text: &str) -> Option<Self> {
        let mut list = Self::default();
        list.flatten("", &serde_json::from_str(text).ok()?);
        Some(list)
    }

    fn flatten(&mut self, key: &str, value: &serde_json::Value) {
        use serde_json::Value;
        let nested_key = |name: &str| match key {
            "" => name.to_owned(),
            key => format!("{key}.{name}"),
        };
        match value {
            Value::Null => {}
            Value::Bool(true) => self.push(key, "on"),
            Value::Bool(false) => self.push(key, "off"),
            Value::Number(number) => self.push(key, number.to_string()),
            Value::String(text) => self.push(key, text.clone()),
            Value::Array(values) => {
                for (index, value) in values.iter().enumerate() {
                    self.flatten(&nested_key(&index.to_string()), value);
                }
            }
            Value::Object(values) => {
                for (name, value) in values {
                    self.flatten(&nested_key(name), value);
                }
            }
        }
    }

    /// Returns a list whose first value has an implied key, such as a device's driver.
    pub fn with_implied(implied: &str, value: &str) -> Self {
        Self { pairs: vec![(implied.to_owned(), value.to_owned())], implied_first: true }
    }

    /// Returns the value in effect, which is the last one.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.pairs.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// Returns all pairs, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.pairs.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// Appends a pair.
    pub fn push(&mut self, key: &str, value: impl Into<String>) {
        self.pairs.push((key.to_owned(), value.into()));
    }

    /// Appends a pair, and returns the list.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl Into<String>) -> Self {
        self.push(key, value);
        self
    }

    /// Changes the value of `key` in place, or appends the pair.
    pub fn set(&mut self, key: &str, value: &str) {
        let mut found = false;
        for (name, old) in &mut self.pairs {
            if name == key {
                value.clone_into(old);
                found = true;
            }
        }
        if !found {
            self.push(key, value);
        }
    }

    /// Removes all pairs with this key.
    pub fn remove(&mut self, key: &str) {
        if self.implied_first && self.pairs.first().is_some_and(|(name, _)| name == key) {
            self.implied_first = false;
        }
        self.pairs.retain(|(name, _)| name != key);
    }
}

/// Returns the value at the start of `text`, and the rest after its comma.
fn split_value(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut rest = text;
    while let Some(comma) = rest.find(',') {
        value.push_str(&rest[..comma]);
        rest = &rest[comma + 1..];
        match rest.strip_prefix(',') {
            Some(remainder) => {
                value.push(',');
                rest = remainder;
            }
            None => return (value, rest),
        }
    }
    value.push_str(rest);
    (value, "")
}

impl fmt::Display for KeyValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (key, value)) in self.pairs.iter().enumerate() {
            if index > 0 {
                f.write_str(",")?;
            }
            if index > 0 || !self.implied_first {
                write!(f, "{key}=")?;
            }
            f.write_str(&value.replace(',', ",,"))?;
        }
        Ok(())
    }
}

/// Parses a boolean in QEMU's notation.
pub fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "on" | "yes" | "true" | "y" => Some(true),
        "off" | "no" | "false" | "n" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lists_are_parsed_as_in_qemu() {
        let list = KeyValues::parse("file=/a,,b=c,if=virtio,readonly,nosnapshot,if=none", None);
        assert_eq!(list.get("file"), Some("/a,b=c"));
        assert_eq!(list.get("readonly"), Some("on"));
        assert_eq!(list.get("snapshot"), Some("off"));
        assert_eq!(list.get("if"), Some("none"));
        assert_eq!(list.get("format"), None);
        let device = KeyValues::parse("virtio-blk-pci,drive=d0,addr=05.0", Some("driver"));
        assert_eq!(device.get("driver"), Some("virtio-blk-pci"));
        assert_eq!(device.to_string(), "virtio-blk-pci,drive=d0,addr=05.0");
        assert_eq!(KeyValues::parse("driver=x,y=1", Some("driver")).to_string(), "driver=x,y=1");
        assert_eq!(KeyValues::parse("", None), KeyValues::default());
        assert_eq!(KeyValues::parse("a=,b=", None).to_string(), "a=,b=");
    }

    #[test]
    fn json_object_is_flattened_to_list() {
        let list = KeyValues::parse_json(
            r#"{"driver": "raw", "read-only": true, "file": {"driver": "file", "filename": "/a,b"}, "n": [1, null, "x"]}"#,
        );
        let list = list.expect("is JSON");
        assert_eq!(list.to_string(), "driver=raw,file.driver=file,file.filename=/a,,b,n.0=1,n.2=x,read-only=on");
        assert_eq!(KeyValues::parse_json("{'driver': 1}"), None);
    }

    #[test]
    fn pairs_are_changed_in_place() {
        let mut list = KeyValues::parse("ram,id=a,size=1G,id=b", Some("kind"));
        list.set("id", "c");
        list.set("share", "on");
        assert_eq!(list.to_string(), "ram,id=c,size=1G,id=c,share=on");
        list.remove("kind");
        list.remove("id");
        assert_eq!(list.to_string(), "size=1G,share=on");
    }

    proptest! {
        #[test]
        fn printed_list_parses_back(pairs in prop::collection::vec(("[a-z.-]{1,6}", ".{0,12}"), 0..6)) {
            let mut list = KeyValues::default();
            for (key, value) in &pairs {
                list.push(key, value.clone());
            }
            prop_assert_eq!(KeyValues::parse(&list.to_string(), None), list);
        }

        #[test]
        fn arbitrary_text_never_panics_parser(text in ".{0,40}", implied in any::<bool>()) {
            let implied = implied.then_some("driver");
            let list = KeyValues::parse(&text, implied);
            let again = KeyValues::parse(&list.to_string(), implied);
            prop_assert_eq!(again.get("file"), list.get("file"));
        }
    }
}
