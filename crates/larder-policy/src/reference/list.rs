//! Doubly linked lists of keys; a key is in at most one of them.

const NONE: u32 = u32::MAX;

/// Number of the list of a key that is in none.
pub(super) const NO_LIST: u8 = u8::MAX;

/// `N` lists, each with its oldest key at the back.
pub(super) struct KeyLists<const N: usize> {
    /// Next key towards the front; `older` is the next key towards the back.
    newer: Vec<u32>,
    older: Vec<u32>,
    list: Vec<u8>,
    front: [u32; N],
    back: [u32; N],
    len: [usize; N],
}

impl<const N: usize> KeyLists<N> {
    /// Creates empty lists for keys below `keys`.
    pub(super) fn new(keys: usize) -> Self {
        Self {
            newer: vec![NONE; keys],
            older: vec![NONE; keys],
            list: vec![NO_LIST; keys],
            front: [NONE; N],
            back: [NONE; N],
            len: [0; N],
        }
    }

    /// Returns the list that a key is in, or `NO_LIST`.
    pub(super) fn list_of(&self, key: u32) -> u8 {
        self.list[key as usize]
    }

    pub(super) fn len(&self, list: u8) -> usize {
        self.len[usize::from(list)]
    }

    /// Returns the oldest key of a list.
    pub(super) fn back(&self, list: u8) -> Option<u32> {
        Some(self.back[usize::from(list)]).filter(|key| *key != NONE)
    }

    /// Returns the next key towards the front.
    pub(super) fn newer(&self, key: u32) -> Option<u32> {
        Some(self.newer[key as usize]).filter(|key| *key != NONE)
    }

    /// Moves a key to the front of a list, from any list or none.
    pub(super) fn push(&mut self, list: u8, key: u32) {
        self.remove(key);
        let front = self.front[usize::from(list)];
        self.older[key as usize] = front;
        self.newer[key as usize] = NONE;
        match front {
            NONE => self.back[usize::from(list)] = key,
            front => self.newer[front as usize] = key,
        }
        self.front[usize::from(list)] = key;
        self.list[key as usize] = list;
        self.len[usize::from(list)] += 1;
    }

    /// Removes a key from its list, if it is in one.
    pub(super) fn remove(&mut self, key: u32) {
        let list = self.list[key as usize];
        if list == NO_LIST {
            return;
        }
        let (newer, older) = (self.newer[key as usize], self.older[key as usize]);
        match newer {
            NONE => self.front[usize::from(list)] = older,
            newer => self.older[newer as usize] = older,
        }
        match older {
            NONE => self.back[usize::from(list)] = newer,
            older => self.newer[older as usize] = newer,
        }
        self.list[key as usize] = NO_LIST;
        self.len[usize::from(list)] -= 1;
    }

    /// Removes the oldest key of a list, and returns it.
    pub(super) fn pop(&mut self, list: u8) -> Option<u32> {
        let key = self.back(list)?;
        self.remove(key);
        Some(key)
    }
}
