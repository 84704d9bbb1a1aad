//! QEMU's `key=value,key=value` lists, as in `-drive`, `-device` and `-object`.
//!
//! The rules are those of QEMU's `util/qemu-option.c`: a comma within a value is doubled, `key` alone means `key=on`,
//! `nokey` means `key=off`, and where a key is given twice the last one counts. Some options imply the key of their
//! first part: `-device virtio-blk-pci,...` is `driver=virtio-blk-pci,...`.

use std::fmt;

/// One such list. What it holds in order; printing it gives text that QEMU reads as the same list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyValues {
    pairs: Vec<(String, String)>,
    /// The first pair is printed without its key.
    implied_first: bool,
}

impl KeyValues {
    /// Reads a list; `implied` is the key of a first part without one.
    pub fn parse(text: &str, implied: Option<&str>) -> Self {
        let mut list = Self::default();
        let mut rest = text;
        while !rest.is_empty() {
            let key_end = rest.find(['=', ',']).unwrap_or(rest.len());
            let has_value = rest[key_end..].starts_with('=');
            if has_value {
                let (value, behind) = take_value(&rest[key_end + 1..]);
                list.push(&rest[..key_end], value);
                rest = behind;
                continue;
            }
            if let (true, Some(key)) = (list.pairs.is_empty(), implied) {
                let (value, behind) = take_value(rest);
                list.push(key, value);
                list.implied_first = true;
                rest = behind;
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

    /// Reads an object in JSON, as `-device` and `-blockdev` also take it: what lies within is `outer.inner`. `None` if
    /// it is none.
    pub fn parse_json(text: &str) -> Option<Self> {
        let mut list = Self::default();
        list.flatten("", &serde_json::from_str(text).ok()?);
        Some(list)
    }

    fn flatten(&mut self, key: &str, value: &serde_json::Value) {
        use serde_json::Value;
        let within = |name: &str| match key {
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
                    self.flatten(&within(&index.to_string()), value);
                }
            }
            Value::Object(values) => {
                for (name, value) in values {
                    self.flatten(&within(name), value);
                }
            }
        }
    }

    /// A list that begins with a value whose key is implied, such as a device's driver.
    pub fn of(implied: &str, value: &str) -> Self {
        Self {
            pairs: vec![(implied.to_owned(), value.to_owned())],
            implied_first: true,
        }
    }

    /// The value that counts.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.pairs
            .iter()
            .rev()
            .find(|(name, _)| name == key)
            .map(|(_, value)| value.as_str())
    }

    /// All pairs, in order.
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

    /// Changes the value of `key` where it stands, or appends it.
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

    /// Takes out every pair of that key.
    pub fn remove(&mut self, key: &str) {
        if self.implied_first && self.pairs.first().is_some_and(|(name, _)| name == key) {
            self.implied_first = false;
        }
        self.pairs.retain(|(name, _)| name != key);
    }
}

/// The value at the start of `text`, and what follows its comma.
fn take_value(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut rest = text;
    while let Some(comma) = rest.find(',') {
        value.push_str(&rest[..comma]);
        rest = &rest[comma + 1..];
        match rest.strip_prefix(',') {
            Some(behind) => {
                value.push(',');
                rest = behind;
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

/// A truth value as QEMU reads it.
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
    fn lists_are_read_as_qemu_reads_them() {
        let list = KeyValues::parse("file=/a,,b=c,if=virtio,readonly,nosnapshot,if=none", None);
        assert_eq!(list.get("file"), Some("/a,b=c"));
        assert_eq!(list.get("readonly"), Some("on"));
        assert_eq!(list.get("snapshot"), Some("off"));
        assert_eq!(list.get("if"), Some("none"));
        assert_eq!(list.get("format"), None);
        let device = KeyValues::parse("virtio-blk-pci,drive=d0,addr=05.0", Some("driver"));
        assert_eq!(device.get("driver"), Some("virtio-blk-pci"));
        assert_eq!(device.to_string(), "virtio-blk-pci,drive=d0,addr=05.0");
        assert_eq!(
            KeyValues::parse("driver=x,y=1", Some("driver")).to_string(),
            "driver=x,y=1"
        );
        assert_eq!(KeyValues::parse("", None), KeyValues::default());
        assert_eq!(KeyValues::parse("a=,b=", None).to_string(), "a=,b=");
    }

    #[test]
    fn an_object_in_json_is_a_list_too() {
        let list = KeyValues::parse_json(
            r#"{"driver": "raw", "read-only": true, "file": {"driver": "file", "filename": "/a,b"}, "n": [1, null, "x"]}"#,
        );
        let list = list.expect("is JSON");
        assert_eq!(
            list.to_string(),
            "driver=raw,file.driver=file,file.filename=/a,,b,n.0=1,n.2=x,read-only=on"
        );
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
        fn what_is_printed_reads_back_the_same(pairs in prop::collection::vec(("[a-z.-]{1,6}", ".{0,12}"), 0..6)) {
            let mut list = KeyValues::default();
            for (key, value) in &pairs {
                list.push(key, value.clone());
            }
            prop_assert_eq!(KeyValues::parse(&list.to_string(), None), list);
        }

        #[test]
        fn any_text_is_read_without_a_panic(text in ".{0,40}", implied in any::<bool>()) {
            let implied = implied.then_some("driver");
            let list = KeyValues::parse(&text, implied);
            let again = KeyValues::parse(&list.to_string(), implied);
            prop_assert_eq!(again.get("file"), list.get("file"));
        }
    }
}
